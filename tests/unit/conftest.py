def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew; read the diff before you commit it")
