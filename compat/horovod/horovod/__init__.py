"""The package ``horovod``, which leads to Farandole: see ``farandole.horovod.names``."""

from farandole.horovod import names

names.stand_in()
