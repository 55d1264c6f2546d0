"""Is a wrong rewrite told at compile time?"""
