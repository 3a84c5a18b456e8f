"""A job on a Kubernetes cluster: what is created there, how it is watched and how it is told."""
