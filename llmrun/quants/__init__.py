"""How weights are stored: one file per format family, each the readable specification of its blocks.

A type's file says where its bits lie and sorts them out into integers and scales; unpacked.py says what those mean, the
same for all of them. registry.py is the table of types.
"""
