"""Chat templates: untrusted programs in model files that turn a conversation into the prompt format of the model.

These modules run in llmrun itself:

chat_template.py  chooses the template, sets its variables, protects the user's text, and renders in a child process
tool_format.py    the results of probing a template, such as the format of its tool calls

These modules run only in the child process, which imports Jinja2:

worker.py         answers requests
jinja.py          Jinja2, configured as in `transformers`
probing.py        finds a template's thinking tags and its thinking switch by rendering test conversations
tool_probing.py   finds the format of tool calls by rendering test conversations
"""
