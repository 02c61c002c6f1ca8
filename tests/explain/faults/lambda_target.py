"""A spawned process is given a function that has no name to find it by."""

import multiprocessing as mp


def main():
    process = mp.get_context("spawn").Process(target=lambda: print("working"))
    process.start()
    process.join()


if __name__ == "__main__":
    main()
