"""`python -m paceline`: the command of the environment whose Python runs it."""

from paceline import main

if __name__ == "__main__":
    main()
