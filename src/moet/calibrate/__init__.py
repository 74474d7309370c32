"""The calibration file: what each layer of a model saw, collected once for levels 1 to 3."""

from moet.calibrate.layout import CalibrationLayout, Metadata
from moet.calibrate.reader import Calibration
from moet.calibrate.sink import SampleSink
from moet.calibrate.tokens import Windows, cut_windows, read_text, read_tokens
from moet.calibrate.writer import CalibrationWriter

__all__ = [
    "Calibration",
    "CalibrationLayout",
    "CalibrationWriter",
    "Metadata",
    "SampleSink",
    "Windows",
    "cut_windows",
    "read_text",
    "read_tokens",
]
