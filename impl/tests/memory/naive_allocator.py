"""The caching allocator once more, as slow and plain as possible: the judge of the replay.

It keeps no lists of free blocks and no links: only which addresses are in use and which have memory behind them. Free
blocks are found by looking at everything, each time.
"""

from itertools import pairwise

MIB = 2**20


class Area:
    """A range of addresses with memory behind some of it (all of it, unless it is expandable)."""

    def __init__(self, start, end, small, page=None):
        self.start, self.end, self.small, self.page = start, end, small, page
        self.used = {}  # start -> end
        self.pages = set()

    def reserved(self):
        return self.end - self.start if self.page is None else len(self.pages) * self.page

    def holes(self):
        """Ranges that nobody uses, with True where memory is behind them; ranges of one kind are as long as can be."""
        found, at = [], self.start
        for start, end in [*sorted(self.used.items()), (self.end, self.end)]:
            if at < start:
                found += self.kinds(at, start)
            at = end
        return found

    def kinds(self, start, end):
        if self.page is None:
            return [(start, end, True)]
        cuts = sorted({start, end} | {p for page in self.pages for p in (page, page + self.page) if start < p < end})
        parts = []
        for one, other in pairwise(cuts):
            mapped = any(page <= one < page + self.page for page in self.pages)
            if parts and parts[-1][2] == mapped:
                parts[-1] = (parts[-1][0], other, mapped)
            else:
                parts.append((one, other, mapped))
        return parts


class Naive:
    def __init__(self, capacity=10**15, max_split=10**15, rounding=20 * MIB, expandable=False):
        self.capacity, self.max_split, self.rounding, self.expandable = capacity, max_split, rounding, expandable
        self.areas = []
        self.where = {}
        self.top = 0

    @property
    def reserved(self):
        return sum(area.reserved() for area in self.areas)

    @property
    def allocated(self):
        return sum(end - start for area in self.areas for start, end in area.used.items())

    def alloc(self, name, request):
        """False where the device is full."""
        size = max(512, (request + 511) // 512 * 512)
        small = size <= MIB
        place = self.cached(size, small)
        for release in (None, lambda: self.release_large(size, small), self.empty_cache):
            if place is None and (release is None or release() is not False):
                place = self.fresh(size, small)
        if place is None:
            return False
        area, start, end = place
        spare = end - start - size
        cut = spare >= 512 if small or self.expandable else size < self.max_split and spare > MIB
        area.used[start] = start + size if cut else end
        self.where[name] = area, start
        return True

    def free(self, name):
        area, start = self.where.pop(name)
        del area.used[start]

    def empty_cache(self):
        for area in self.areas:
            if area.page is not None:
                free = [(one, other) for one, other, mapped in area.holes() if mapped]
                gone = {p for p in area.pages if any(one <= p and p + area.page <= other for one, other in free)}
                area.pages -= gone
        self.areas = [area for area in self.areas if area.used or (area.page is not None and area.pages)]

    def cached(self, size, small):
        found = []
        for area in self.areas:
            if area.small == small:
                holes = area.holes()
                for number, (start, end, mapped) in enumerate(holes):
                    if not mapped:
                        continue
                    grow = 0
                    if number + 1 < len(holes) and holes[number + 1][0] == end:
                        grow = holes[number + 1][1] - end
                    found.append((end - start, start, end, grow, area))
        found = sorted((one for one in found if one[0] >= size), key=lambda one: one[:2])
        if not found:
            return None
        best = 0
        if self.expandable:
            while best + 1 < len(found) and found[best + 1][0] + found[best + 1][3] < found[best][0] + found[best][3]:
                best += 1
        length, start, end, _, area = found[best]
        if size < self.max_split <= length or (size >= self.max_split and length >= size + self.rounding):
            return None
        return area, start, end

    def fresh(self, size, small):
        if self.expandable:
            return self.grown(size, small)
        length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.reserved + length > self.capacity:
            return None
        area = Area(self.top, self.top + length, small)
        self.top += length
        self.areas.append(area)
        return area, area.start, area.end

    def release_large(self, size, small):
        """One whole free area of at least the size (and of the limit), else the largest ones until it is reached."""
        if self.max_split == 10**15:
            return False
        needed = max(size, self.max_split)
        free = [area for area in self.areas if area.small == small and not area.used]
        free.sort(key=lambda area: (area.reserved(), area.start))
        enough = [area for area in free if area.reserved() >= needed]
        if enough:
            self.areas.remove(enough[0])
            return True
        got = 0
        for area in reversed(free):
            if got < needed and area.reserved() >= self.max_split:
                self.areas.remove(area)
                got += area.reserved()
        return got >= needed

    def grown(self, size, small):
        for area in [*self.areas, None]:
            if area is None:
                page = 2 * MIB if small else 20 * MIB
                space = (self.capacity * 9 // 8 + page - 1) // page * page
                area = Area(self.top, self.top + space, small, page)
                self.top += space
                self.areas.append(area)
            if area.small != small:
                continue
            holes = area.holes()
            runs = []  # [start, end, number of the first hole]: holes that touch
            for number, (start, end, _) in enumerate(holes):
                if runs and runs[-1][1] == start:
                    runs[-1][1] = end
                else:
                    runs.append([start, end, number])
            for number, (start, _, mapped) in enumerate(holes):
                if mapped:
                    continue
                end = next(run[1] for run in runs if run[0] <= start < run[1])
                begin = holes[number - 1][0] if number and holes[number - 1][1] == start else start
                if end - begin >= size:
                    return self.filled(area, begin, begin + size)
        raise AssertionError

    def filled(self, area, begin, end):
        """Pages for every hole without memory in [begin, end), hole by hole; None where they run out."""
        for start, stop, mapped in list(area.kinds(begin, area.end)):
            if mapped or start >= end:
                continue
            pages = list(range(start, min(stop, end), area.page))
            if self.reserved + len(pages) * area.page > self.capacity:
                return None
            area.pages |= set(pages)
        top = next(stop for start, stop, mapped in area.holes() if mapped and start <= begin < stop)
        return area, begin, top
