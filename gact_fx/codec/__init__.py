"""The storage format: codes, their arithmetic and layout in bytes, and the operators that write and read them."""
