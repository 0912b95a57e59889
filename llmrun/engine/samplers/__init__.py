"""The samplers that the kernel does not have, as pure functions, and draws with samplers in any order.

chain.py        the samplers by name, their order, and the draw
needs.py        the conditions under which a request needs this folder
base.py         the place in a sequence, which samplers receive along with the candidates
state.py        the state that Mirostat and adaptive-p carry from token to token
numbers.py      logarithms and probabilities with the same bits on every machine
dry.py, repetitions.py, breakers.py              penalties for continuing a repetition
top_n_sigma.py, typical.py, xtc.py               filters
temperature.py                                   fixed and dynamic temperatures
mirostat.py, adaptive.py                         replacements of the draw, which have a state
"""
