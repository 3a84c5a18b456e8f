"""Listens to events and says where the time goes. Nothing it watches knows it."""
