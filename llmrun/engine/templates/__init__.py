"""Chat templates: programs from strangers' files, which write a conversation as the text that a model was trained on.

chat_template.py  which template, with which variables, and what stays mere text in it
families.py       templates for files that bring none
process.py        the process that runs templates, watched from this side
abilities.py      what trying a template tells about it

In that process alone, which imports Jinja2:

worker.py         one request after another, within the limits
jinja.py          Jinja2 as `transformers` sets it up
probing.py        tries a template to find its switch for thinking and its tags
mentions.py       the names and texts of thinking in a template's source

frames.py         how both sides talk
"""
