"""What was trained, used: networks by their names, exports, embeddings of any images."""
