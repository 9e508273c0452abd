"""Operations by stock torch operators."""
