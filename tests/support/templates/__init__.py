"""Chat templates that people publish, five chats, and what is learned of each: written by hand, from what each template says.

Reading order: conversations, expected, template; then a file for each family of templates, and published, which lists them.
"""
