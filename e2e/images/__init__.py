"""The images that the local cluster runs, built without an image builder and loaded without a registry."""
