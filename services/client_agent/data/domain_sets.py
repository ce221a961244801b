"""What PACS, VLCS, Office-Home and TerraIncognita consist of, as DomainBed prepares them: ROOT/DOMAIN/CLASS/FILE."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DOMAIN_SETS", "DomainSet"]


@dataclass(frozen=True)
class DomainSet:
    """`domains` are our names, which can be institutions, and the folders on disk."""

    title: str
    folder: str  # of the set in DomainBed's data folder
    domains: Mapping[str, str]
    classes: tuple[str, ...]


PACS = DomainSet(
    title="PACS",
    folder="PACS",
    domains={"art-painting": "art_painting", "cartoon": "cartoon", "photo": "photo", "sketch": "sketch"},
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
)

VLCS = DomainSet(
    title="VLCS",
    folder="VLCS",
    domains={"caltech101": "Caltech101", "labelme": "LabelMe", "sun09": "SUN09", "voc2007": "VOC2007"},
    classes=("bird", "car", "chair", "dog", "person"),
)

# Fixed in letter case and underscores, as the folders are named.
OFFICE_HOME_NAMES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet
Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil
Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon
TV Table Telephone ToothBrush Toys Trash_Can Webcam
"""

OFFICE_HOME = DomainSet(
    title="Office-Home",
    folder="office_home",
    domains={"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"},
    classes=tuple(OFFICE_HOME_NAMES.split()),
)

TERRA_INCOGNITA = DomainSet(
    title="TerraIncognita",
    folder="terra_incognita",
    domains={f"location-{number}": f"location_{number}" for number in (38, 43, 46, 100)},
    classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
)

DOMAIN_SETS = {"pacs": PACS, "vlcs": VLCS, "office-home": OFFICE_HOME, "terra-incognita": TERRA_INCOGNITA}
