IDS = ("reducer.control_record",)


def measure(request, conditions):
    return iter(())
