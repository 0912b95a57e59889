"""Support for models that think before they answer: separates, switches and limits thinking.

styles.py     the thinking tags of each model family, and the detection of a model's style
splitter.py   splits streamed text into thinking and answer
decoder.py    decodes tokens into thinking and answer, and applies stop strings to the answer
prompting.py  switches thinking on or off in the prompt
"""
