"""What users can choose: settings, presets and sampling parameters."""
