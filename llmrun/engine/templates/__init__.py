"""Chat templates: programs from untrusted files that write a conversation as the text that a model was trained on.

chat_template.py  which template is used, with which variables, and what must stay plain text in it
families.py       templates for files that have none
process.py        starts, asks and watches the process that runs templates
abilities.py      what trying a template tells about it

Only in that process, which imports Jinja2:

worker.py         answers one request after another, within the limits
jinja.py          Jinja2, set up as in `transformers`
probing.py        tries a template to find its tags and its switch for thinking
mentions.py       the variables, keys and texts in a template's source that concern thinking

On both sides:

frames.py         how the two processes talk
"""
