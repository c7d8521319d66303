"""The records of a rank: the flight recorder, and the reports and dump files made from it."""
