"""From a client's picture to patches: found, decoded, resized, padded, cut. Knows neither the model nor the server."""
