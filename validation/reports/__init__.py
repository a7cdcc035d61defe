"""Wrong numbers that users have reported of other libraries."""
