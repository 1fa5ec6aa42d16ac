"""What a page of HTML holds, as a browser would read it."""

import html.parser

VOID = {"meta", "br", "img"}


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes and texts; every one has to be closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        one = {"tag": tag, "text": "", "inside": [other["tag"] for other in self.open], **dict(attributes)}
        self.elements.append(one)
        if tag not in VOID:
            self.open.append(one)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", "inside": [], **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        self.words.append(data)
        for one in self.open:
            one["text"] += data

    def all(self, tag):
        return [one for one in self.elements if one["tag"] == tag]
