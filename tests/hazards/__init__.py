"""Small forwards as people write them, and random ones, converted and judged against one worker."""
