"""Exactness of every layer family, in float64 and float32."""
