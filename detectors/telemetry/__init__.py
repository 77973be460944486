"""The health of telemetry itself: silence and its cause, broken instruments, clocks."""
