"""The most that a file or an option may ask for. Each limit is several times what the largest known use needs, and what keeps
to all of them is read and checked in seconds. Whatever is beyond is refused first, with both numbers.

A file is refused before it is parsed (its size), while it is parsed (levels, values, aliases), or when its keys are checked
(numbers). `hetpipe schema` prints the limits of the numbers.
"""

MOST_FILE_BYTES = 256 * 2**20  # a JSON file; the profile of 4,096 layers on ten types at eight sizes has 13 MB
MOST_YAML_BYTES = 4 * 2**20  # YAML takes a hundred times as long to read; 4,096 nodes of eight devices have 0.3 MB
MOST_YAML_VALUES = 100_000  # mappings, lists and scalars, with all that aliases stand for; 4,096 nodes have 60,000
MOST_LEVELS = 100  # of mappings and lists in each other; a job has six, what a model's `args` hold comes on top
MOST_CHARACTERS = 1_000  # of a name, a path or an address
LARGEST_INTEGER = 2**63 - 1  # what 64 bits hold

MOST_DEVICES = 65_536  # of a cluster, and so its nodes; planning is tested with 4,096
MOST_WIDTH = 2**24  # features, words of a vocabulary, positions of a model
MOST_LABELS = 2**17  # classes of a model of transformers, which names each
MOST_LAYERS = 10_000  # of a model; planning is tested with a few thousand
MOST_BATCH = 2**20  # samples of a step, and so its micro-batches
MOST_SUBCLUSTERS = 4_000  # that a front is of; 0 to 8 nodes of each of three templates are 728
MOST_WORKERS = 256  # of a rank; a host has some hundred processors
MOST_COUNT = 10**12  # steps, epochs, seeds, samples

MOST_BYTES = 10**18  # an exabyte
MOST_BYTES_PER_SECOND = 1e300  # a link that costs nothing
LEAST_BYTES_PER_SECOND = 1e-3
MOST_SECONDS = 1e9  # thirty years
LEAST_MODEL_SECONDS = 1e-9  # that all layers take together, forward and backward, on a device that is planned for
MOST_PRICE = 1e9  # currency units per hour
MOST_FACTOR = 1e6  # a slowdown, bytes over bytes

MOST_FAULT_CHARACTERS = 300  # of one fault in a message
MOST_LINES = 10  # of a message
