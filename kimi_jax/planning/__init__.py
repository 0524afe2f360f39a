"""The model's trees and steps, handed to placement."""
