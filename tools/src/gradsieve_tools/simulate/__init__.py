"""`gradsieve simulate`: what a step takes at many ranks on networks that are not there.

platforms    the networks, as SimGrid reads them
recording    the schemes' own generators at P virtual ranks; the calls they make, at the size asked for
study        both together: seconds, efficiency and loads, a row a scheme and world
picture      these rows drawn; page: the same as HTML
"""
