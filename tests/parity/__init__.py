"""Mappings of other frameworks' functions to compositions of this library's, one module a group of vectors."""
