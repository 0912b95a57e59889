"""Chat templates: untrusted programs in model files that turn a conversation into the prompt format of the model.

These modules run in llmrun itself:

chat_template.py  chooses the template, sets its variables and protects the user's text
families.py       fallback templates for files without one
process.py        sends requests to the isolated process that renders templates
abilities.py      the results of probing a template
tool_format.py    the description of a model's tool calls, which is one of these results

These modules run only in the child process, which imports Jinja2:

worker.py         answers requests
jinja.py          Jinja2, configured as in `transformers`
probing.py        finds a template's thinking tags and its thinking switch by rendering test conversations
tool_probing.py   finds the format of tool calls by rendering test conversations
tool_layout.py    compares rendered texts to derive that format
known_tools.py    the formats of tool calls that templates do not reveal
mentions.py       finds the variables, keys and texts related to thinking in a template's source
"""
