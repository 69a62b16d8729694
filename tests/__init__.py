"""Tests. A package, so that rank processes import a test module under the same name as pytest does."""
