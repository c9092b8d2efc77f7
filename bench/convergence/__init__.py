"""Do plans train what one device trains?"""
