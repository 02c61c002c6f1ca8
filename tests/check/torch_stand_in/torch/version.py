__version__ = "2.99.0+git0123456"
git_version = "0123456"
cuda = None
hip = None
debug = False
