"""Programs that show the bus at work; the tests run every one of them."""
