"""Earlier conversations: listing, showing, searching, exporting and removing them."""
