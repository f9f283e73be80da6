"""Small forwards as people write them, and random ones, converted and compared with one worker."""
