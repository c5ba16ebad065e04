"""The checks of backends for layers that keep a state: numbers, pages and serving schedules."""
