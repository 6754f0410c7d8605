"""Django: a backend for its Tasks, and ``manage.py rota_worker``.

    INSTALLED_APPS = [..., "rota.contrib.django"]
    TASKS = {"default": {"BACKEND": "rota.contrib.django.backend.RotaBackend"}}

The backend is for ``django.tasks`` where Django has it, else for the package django-tasks.
"""
