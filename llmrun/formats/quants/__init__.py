"""The weight formats. Each family of formats has one file, which is the readable specification of its blocks.

The file documents where the bits are located and unpacks them into integers and scales. weight_type.py computes
weights from integers and scales in the same way for all types. registry.py is the table of types.
"""
