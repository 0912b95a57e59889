"""Tools in a chat: showing calls, asking the user before they run, and listing the tools."""
