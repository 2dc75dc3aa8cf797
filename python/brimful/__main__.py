"""`python -m brimful --cmake-dir`: where find_package(brimful) is to look."""

import argparse

import brimful


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m brimful")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--version", action="version", version=brimful.__version__)
    choice.add_argument(
        "--cmake-dir", action="store_true", help="print the folder to add to CMAKE_PREFIX_PATH"
    )
    parser.parse_args()
    print(brimful.cmake_prefix_path)


if __name__ == "__main__":
    main()
