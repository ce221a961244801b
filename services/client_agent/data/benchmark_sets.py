"""What CIFAR-10, CIFAR-100, SVHN and DTD consist of: image sets of one piece, without domains."""

import string
from collections.abc import Mapping

__all__ = ["BENCHMARK_SETS"]

# The order of the class numbers in the files.
CIFAR_10 = "airplane automobile bird cat deer dog frog horse ship truck"

CIFAR_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

DTD = """
banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted fibrous flecked
freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined marbled matted meshed paisley
perforated pitted pleated polka-dotted porous potholed scaly smeared spiralled sprinkled stained stratified striped
studded swirly veined waffled woven wrinkled zigzagged
"""

# Name -> classes.
BENCHMARK_SETS: Mapping[str, tuple[str, ...]] = {
    "cifar-10": tuple(CIFAR_10.split()),
    "cifar-100": tuple(CIFAR_100.split()),
    "svhn": tuple(string.digits),
    "dtd": tuple(DTD.split()),
}
