"""Finding good settings by trying them: pure searches, and the session that scores trials.

Refused here: anything that knows what a setting does. A front makes the space of settings, applies
what a session says, and measures.
"""
