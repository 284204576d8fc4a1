"""Spec to ``Resolved``, or the list of what is wrong with it. Pure.

The CRD's schema and CEL rules refuse most mistakes at admission. This package must not rely on them: a resource may
have been stored under an older CRD, so every rule is checked again. It also holds the rules that a schema cannot state:
environment variables and pod template parts that the operator owns, keys of label maps, what an instance type offers.

One file per part of the spec, as in ``api/``; ``resource.py`` puts them together. Every default is here, and nowhere
else: what an unset field means is decided in ``resolve_*`` and said in the field's description.
"""

from bidikv_operator.validate.arguments import find_owned_flag
from bidikv_operator.validate.problem import Problem, Rejected
from bidikv_operator.validate.resource import validate

__all__ = ["Problem", "Rejected", "find_owned_flag", "validate"]
