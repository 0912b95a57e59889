"""Contains the choices that users can make: settings, presets and sampling parameters."""
