"""The collectives, one file each: what is checked, what travels, what comes back."""
