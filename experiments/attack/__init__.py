"""Can the proof be wrong? Random steps, random rewrites, and what a run says."""
