"""Exactness of whole networks, in float64 and float32."""
