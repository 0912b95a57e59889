"""The weight formats. Each family has one file, which is the readable specification of its blocks.

That file says where the bits lie and unpacks them into integers and scales. unpacked.py turns those into weights, in
the same way for all types. registry.py is the table of types.
"""
