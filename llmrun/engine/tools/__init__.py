"""Tools that a chat can call: MCP servers over stdio and plain commands."""
