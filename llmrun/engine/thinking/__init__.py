"""What a model thinks before it answers, told apart from its answer, switched on and off, and limited.

styles.py     the tags of each family, and which of them a model writes
splitter.py   text as it comes -> thinking and answer
decoder.py    tokens -> both, with stop strings for the answer alone
prompting.py  how a prompt asks for thinking, or for none
"""
