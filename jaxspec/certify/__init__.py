"""Certifies that a user's own target and drafter keep what the project promises.

Nothing here is a second implementation of a round: the production programs run, and
plain decoding of one token at a time says what they should have given.
"""

from jaxspec.certify.certificate import certify
from jaxspec.certify.report import Certificate

__all__ = ["Certificate", "certify"]
